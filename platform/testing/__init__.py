"""Fakes and conformance suites: product code, so that whoever brings a part can run ours against it. No pytest here."""
