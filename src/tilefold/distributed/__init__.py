"""Process groups: starting ranks, joining them, collectives and the state that ranks share."""
