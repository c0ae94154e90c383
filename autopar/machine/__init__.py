"""What machine there is: from a table, a file, or measured."""
