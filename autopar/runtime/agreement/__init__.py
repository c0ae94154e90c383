"""Checks that ranks agree, before they wait for each other."""
