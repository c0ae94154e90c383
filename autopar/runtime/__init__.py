"""Running a program: ranks, what they compute, and how they talk."""
