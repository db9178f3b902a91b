//! Tests of `stoker run` with scripted trainers, and of the cluster commands with a real API
//! server.
//!
//! This test binary is also the trainer: `stoker run` starts it with the test
//! [`scripted_trainer`], which follows `data.script` and implements the trainer contract.

#![expect(clippy::unwrap_used, reason = "a failed precondition should end the test")]

#[path = "all/cluster.rs"]
mod cluster;
#[path = "all/cluster_fixture.rs"]
mod cluster_fixture;
#[path = "all/commands.rs"]
mod commands;
#[path = "all/external.rs"]
mod external;
#[path = "all/fixture.rs"]
mod fixture;
#[path = "all/gpus.rs"]
mod gpus;
#[path = "all/metrics.rs"]
mod metrics;
#[path = "all/object_server.rs"]
mod object_server;
#[path = "all/page.rs"]
mod page;
#[path = "all/population.rs"]
mod population;
#[path = "all/previews.rs"]
mod previews;
#[path = "all/run.rs"]
mod run;
#[path = "all/run_changes.rs"]
mod run_changes;
#[path = "all/shapes.rs"]
mod shapes;
#[path = "all/shared_page.rs"]
mod shared_page;
#[path = "all/steer.rs"]
mod steer;
#[path = "all/steer_jobs.rs"]
mod steer_jobs;
#[path = "all/trainer.rs"]
mod trainer;
#[path = "all/ui.rs"]
mod ui;

/// Trainer of the other tests. Does nothing when run as a test.
#[test]
fn scripted_trainer() {
    if let Some(config) = std::env::var_os("STOKER_TRIAL_CONFIG") {
        std::process::exit(trainer::train(std::path::Path::new(&config)));
    }
}
