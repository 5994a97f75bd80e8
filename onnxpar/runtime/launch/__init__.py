"""One command as ranks on several hosts: starts them, supervises them, and leads them from rank
0."""
