"""What the reference pages take from the code, one subject a file."""
