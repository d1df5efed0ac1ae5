"""What a run says about itself: metrics, busy intervals, logs and figures. None of it may fail a run."""
