"""A node and its agents as processes of a machine: their first files, how they are started and tried, and how one sees
that all is well."""
