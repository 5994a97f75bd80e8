"""The order of passes, how they run, what is dumped, and the options of plans."""
