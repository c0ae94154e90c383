"""`python -m autopar`, as torchrun starts it."""

from autopar.cli import program

if __name__ == "__main__":
    program()
