"""`mlxft runs`: what lies in runs/, side by side, and what may go."""
