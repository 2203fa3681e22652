"""What a run left, looked at afterwards: checked, explained, computed again, compared."""
