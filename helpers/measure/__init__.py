"""What a kernel costs: by formula (`cost`), and by replaying it and counting (`traffic`)."""
