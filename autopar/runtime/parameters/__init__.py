"""The parameters of a rank: cut from whole ones, looked at, updated."""
