"""From options to plans: the table of options, attempts at a plan, the order of passes, how passes
run, and dumps."""
