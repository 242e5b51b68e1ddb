"""A federation between organisations: its terms, its members, and what each of them would send."""
