"""The names of the inputs that a decoder gets when its caches are put in pages."""

TABLE, ROWS, POSITIONS, PICKS = "block_table", "token_rows", "token_positions", "picked_tokens"
"""The pages of each text, (texts, pages of a text); the text of each token, and its position there,
(tokens,); and the tokens whose logits are wanted, (picks,)."""
