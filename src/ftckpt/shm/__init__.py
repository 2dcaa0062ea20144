"""Memory that processes of one host share: mapped, never inherited by forked children, told of and found by one user's processes. No policy."""
