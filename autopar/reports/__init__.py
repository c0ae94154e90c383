"""Reports for people: tables, explanations, traces."""
