"""How ranks talk: collectives, messages, and what carries them."""
