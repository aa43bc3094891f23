"""What a person sees while text is generated. Displays take a run's events; only they write to the terminal."""
