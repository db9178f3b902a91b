//! Tests with processes of a pod: launcher and ranks, started as a cluster does.
//!
//! The programs are this binary itself: [`program`] runs the role that a process was given.

#![expect(clippy::unwrap_used, reason = "tests panic on failure")]

use std::process::ExitCode;

mod allocator;
mod cached;
mod custom_loop;
mod data_kinds;
mod gang;
mod gang_restore;
mod hosts;
mod launching;
#[cfg(feature = "learner")]
mod learner;
mod preparing;
mod process;
mod report_server;
mod training;

/// Variable that makes a process of this binary run a program of the tests.
const ENV_ROLE: &str = "STOKER_TEST_ROLE";

/// Not a test: runs the role of a started process. Does nothing in the test process itself.
#[test]
fn program() {
    let Ok(role) = std::env::var(ENV_ROLE) else { return };
    let code = match role.split_once(' ').unwrap_or((&role, "")) {
        ("launch", command) => {
            let command: Vec<String> = serde_json::from_str(command).unwrap();
            stoker_trainer::launch::main(&command)
        }
        ("setup", shared) => stoker_trainer::launch::setup(Some(shared.as_ref())),
        ("gc", file) => stoker_trainer::launch::clean_up(file.as_ref()),
        ("kind", kind) => data_kinds::train(kind),
        ("trial", _) => data_kinds::try_trial(),
        ("cached", folder) => cached::read(folder.as_ref()),
        #[cfg(feature = "learner")]
        ("learn", _) => learner::train(),
        ("allocate", _) => allocator::allocate(),
        ("own", _) => custom_loop::train(),
        ("train", _) => training::train(),
        (other, _) => panic!("unknown role {other}"),
    };
    // Exit here, because the test harness would set its own exit code.
    let code = (0..=u8::MAX).find(|number| ExitCode::from(*number) == code);
    std::process::exit(code.unwrap().into());
}
