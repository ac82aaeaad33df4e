"""What a run did, kept in one file, and the report made of it. record, summary and verdict need no plotly."""
