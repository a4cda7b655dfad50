"""What an optimizer can tell of itself."""
