//! The test cluster does what tests rely on.

#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

mod control_plane;
mod two_nodes;
