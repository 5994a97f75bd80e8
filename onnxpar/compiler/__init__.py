"""What passes see and leave: the pass interface, the plan, verification, text."""
