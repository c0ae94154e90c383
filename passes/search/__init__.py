"""The best plan: every decision that a user did not make."""
