"""The search: agents, board, candidates, validation. It knows engines by `engines.engine` only."""
