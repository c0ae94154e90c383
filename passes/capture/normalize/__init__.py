"""One spelling for each thing that models write in many ways."""
