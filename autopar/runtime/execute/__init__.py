"""The part of a program that one rank runs, action by action."""
