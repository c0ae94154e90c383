"""What a plan takes: seconds and bytes of its parts, on some machine."""
