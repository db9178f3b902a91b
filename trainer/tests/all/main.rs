//! Processes of a pod: launcher and ranks, as a cluster starts them.
//!
//! The programs are this very binary: [`program`] is what a process of it does that was given a role.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::process::ExitCode;

mod cached;
mod door;
mod gang;
mod hosts;
mod kinds;
mod launching;
#[cfg(feature = "learner")]
mod learner;
mod own_loop;
mod preparing;
mod process;
mod training;

/// The variable that makes a process of this binary a program of the tests.
const ENV_ROLE: &str = "STOKER_TEST_ROLE";

/// Not a test, but what a started process does; nothing where this is the test's own process.
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
        ("kind", kind) => kinds::train(kind),
        ("trial", _) => kinds::try_trial(),
        ("cached", folder) => cached::read(folder.as_ref()),
        #[cfg(feature = "learner")]
        ("learn", _) => learner::train(),
        ("own", _) => own_loop::train(),
        ("train", _) => training::train(),
        (other, _) => panic!("no role {other}"),
    };
    // The test harness has an exit code of its own.
    let code = (0..=u8::MAX).find(|it| ExitCode::from(*it) == code);
    std::process::exit(code.unwrap().into());
}
