//! `stoker run` against trainers that follow a script, and `stoker` on a cluster against a real API
//! server.
//!
//! This program is its own trainer: started by `stoker run`, the test [`scripted_trainer`] speaks
//! the contract as its `data.script` says.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should end there")]

#[path = "all/bench.rs"]
mod bench;
#[path = "all/cluster.rs"]
mod cluster;
#[path = "all/run.rs"]
mod run;
#[path = "all/trainer.rs"]
mod trainer;

/// The trainer that the other tests start. Does nothing when it is run as a test.
#[test]
fn scripted_trainer() {
    if let Some(config) = std::env::var_os("STOKER_TRIAL_CONFIG") {
        std::process::exit(trainer::train(std::path::Path::new(&config)));
    }
}
