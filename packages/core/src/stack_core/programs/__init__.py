"""Analysis of compiled programs: operations, costs, collectives, and a lint."""
