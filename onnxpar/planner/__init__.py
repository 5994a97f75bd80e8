"""Options of plans, attempts at a plan, the order of passes, how they run, and what is dumped."""
