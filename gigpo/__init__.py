"""GiGPO and its hierarchical variant: advantages for agents that act over many turns. Needs numpy and torch alone."""
