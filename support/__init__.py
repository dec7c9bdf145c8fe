"""What the stages and the main modules share or hand down; nothing in here is run by itself."""
