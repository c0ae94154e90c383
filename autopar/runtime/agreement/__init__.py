"""What all ranks must have alike, asked before they wait for each other."""
