//! Limit of open files of a runner or a page.

use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Maximum number of files that a runner has open for a program: a socket, two pipes, its process,
/// a connection for reports, and files of its log and record.
const FILES_PER_PROGRAM: u64 = 8;
/// Number of other files: the record, the storage, and viewers of the page.
const OTHER_FILES: u64 = 64;

/// Soft limit before this process raised it.
static INHERITED: OnceLock<u64> = OnceLock::new();

/// Raises the soft limit of open files to the hard limit. Returns `slots`, or fewer if their
/// programs would exceed the limit, and prints a message then. A program uses `slots_per_program`.
pub(crate) fn limit_slots(slots: u32, slots_per_program: u32, print: impl FnOnce(&str)) -> u32 {
    let Some(limit) = raise() else { return slots };
    let slots_max = num_programs(limit).saturating_mul(slots_per_program);
    if slots > slots_max {
        print(&format!(
            "using {slots_max} of {slots} slots: more programs would exceed the limit of {limit} \
             open files; raise it with `ulimit -n`"
        ));
    }
    slots.min(slots_max)
}

/// Raises the soft limit to the hard one. Returns the soft limit; `None` if there is none.
pub(crate) fn raise() -> Option<u64> {
    let before = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: before.maximum, ..before };
    if let Some(soft) = before.current
        && raised != before
        && setrlimit(Resource::Nofile, raised).is_ok()
    {
        // The first value is the inherited one.
        let _ = INHERITED.set(soft);
    }
    getrlimit(Resource::Nofile).current
}

fn num_programs(limit: u64) -> u32 {
    let num = limit.saturating_sub(OTHER_FILES) / FILES_PER_PROGRAM;
    u32::try_from(num).unwrap_or(u32::MAX).max(1)
}

/// Returns the arguments with which `stoker supervise` restores the limit for its program: programs
/// that use `select` cannot have more files.
pub(crate) fn supervise_args() -> Vec<String> {
    let restored = INHERITED.get().map(|soft| ["--open-files".to_owned(), soft.to_string()]);
    restored.into_iter().flatten().collect()
}

/// Sets the soft limit of this process. A limit above the hard one changes nothing.
pub(crate) fn restore(soft: u64) {
    let limit = Rlimit { current: Some(soft), ..getrlimit(Resource::Nofile) };
    let _ = setrlimit(Resource::Nofile, limit);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_fit_into_the_limit_of_files() {
        let check = |limit, expected| assert_eq!(num_programs(limit), expected, "{limit}");
        check(20, 1);
        check(1024, 120);
        check(524_288, 65_528);
    }

    #[test]
    fn soft_limit_becomes_the_hard_one() {
        let limit = raise();
        assert_eq!(limit, getrlimit(Resource::Nofile).maximum);
    }
}
