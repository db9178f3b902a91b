//! Tests of the test cluster itself.

#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

mod control_plane;
mod two_nodes;
