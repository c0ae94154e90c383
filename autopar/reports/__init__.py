"""What people read: tables, explanations, traces."""
