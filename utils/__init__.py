"""What the lessons, the labs and the server share. One idea a file; see the map in README.md."""
