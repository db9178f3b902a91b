//! Exit codes and asynchronous runs of commands.

use std::future::Future;

use crate::failure::Failure;

/// Maps success to exit code 0.
pub(crate) fn done(result: Result<(), Failure>) -> Result<u8, Failure> {
    result.map(|()| 0)
}

/// Runs `future` to completion on a single-threaded runtime.
pub(crate) fn block_on<T>(future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::System(format!("cannot start the async runtime: {error}")))?
        .block_on(future)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, index: Option<u32>, joined: &str, split: Option<(&str, u32)>) {
        let trial = TrialName { name: name.to_owned(), index };
        assert_eq!(trial.joined(), joined);
        assert_eq!(trial.split().ok(), split, "{name} {index:?}");
    }

    #[test]
    fn trial_names_are_joined_and_split() {
        check("mnist-3", None, "mnist-3", Some(("mnist", 3)));
        check("mnist", Some(3), "mnist-3", Some(("mnist", 3)));
        check("a-b-12", None, "a-b-12", Some(("a-b", 12)));
        check("mnist-0b3f9c1e", Some(3), "mnist-0b3f9c1e-3", Some(("mnist-0b3f9c1e", 3)));
        check("mnist", None, "mnist", None);
    }
}
