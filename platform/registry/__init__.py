"""The version registry: blobs, manifests, pins and watching (P8, P9). The head is the ledger's."""
