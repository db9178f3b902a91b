//! Computes a pod's exit code from the results of its ranks.

use rustix::process::Signal;
use stoker_api::contract::ExitCode;
use stoker_api::exit::ExitClass;

/// Result of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RankOutcome {
    pub(super) exit: ProcessExit,
    /// Whether the launcher terminated the rank because another had failed.
    pub(super) was_terminated_by_launcher: bool,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProcessExit {
    Code(i32),
    Signal(i32),
}

impl ProcessExit {
    /// Returns the exit code in the convention of shells.
    fn code(self) -> u8 {
        match self {
            // Exit codes always fit into 8 bits.
            Self::Code(code) => u8::try_from(code).unwrap_or(1),
            Self::Signal(signal) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
        }
    }

    /// Returns `true` if the other ranks must be terminated too.
    pub(super) fn is_failure(self) -> bool {
        ExitClass::of_code(self.code().into()) > ExitClass::Preempted
    }
}

impl RankOutcome {
    fn code(self) -> u8 {
        let is_sent =
            |signal: i32| [Signal::TERM, Signal::KILL].iter().any(|sent| sent.as_raw() == signal);
        let is_reaction = match self.exit {
            // Shells and other wrappers report a signal that ended their child as 128 + signal.
            ProcessExit::Code(code) => code == ExitCode::Preempted as i32 || is_sent(code - 128),
            ProcessExit::Signal(signal) => is_sent(signal),
        };
        match self.was_terminated_by_launcher && is_reaction {
            true => ExitCode::PeerFailed as u8,
            false => self.exit.code(),
        }
    }

    /// Describes the end of a program that left no message; `None` for success.
    pub(super) fn describe(self, last_lines: &str) -> Option<String> {
        let description = match self.exit {
            ProcessExit::Code(code) if code == ExitCode::Completed as i32 => return None,
            ProcessExit::Code(code) => format!("exit code {code}"),
            ProcessExit::Signal(signal) if signal == Signal::TERM.as_raw() => {
                "terminated by SIGTERM, which the program does not handle".into()
            }
            ProcessExit::Signal(signal) if signal == Signal::KILL.as_raw() => {
                "killed (SIGKILL), possibly by the kernel because memory ran out".into()
            }
            ProcessExit::Signal(signal) => format!("terminated by signal {signal}"),
        };
        Some(match last_lines {
            "" => description,
            lines => format!("{description}; last lines: {lines}"),
        })
    }
}

/// Returns the index and the exit code of the first rank with the most severe class. A rank that
/// the launcher ended comes last among equals.
pub(super) fn worst_outcome(outcomes: &[RankOutcome]) -> (usize, u8) {
    let class = |rank: &RankOutcome| ExitClass::of_code(rank.code().into());
    let order =
        |rank: &RankOutcome| (std::cmp::Reverse(class(rank)), rank.was_terminated_by_launcher);
    let worst_outcome = outcomes.iter().enumerate().min_by_key(|(_, rank)| order(rank));
    worst_outcome.map_or((0, ExitCode::Completed as u8), |(index, rank)| (index, rank.code()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses results written as exit codes, `sN` for a signal, `!` if the launcher terminated the
    /// rank.
    fn check(ends: &str, expected: (usize, u8)) {
        let read = |text: &str| {
            let status = text.trim_end_matches('!');
            let exit = match status.strip_prefix('s') {
                Some(signal) => ProcessExit::Signal(signal.parse().unwrap()),
                None => ProcessExit::Code(status.parse().unwrap()),
            };
            RankOutcome { exit, was_terminated_by_launcher: status.len() < text.len() }
        };
        let outcomes: Vec<_> = ends.split_whitespace().map(read).collect();
        assert_eq!(worst_outcome(&outcomes), expected, "{ends}");
    }

    #[test]
    fn worst_rank_decides() {
        check("0", (0, 0));
        check("0 79", (1, 79));
        check("79 80 0", (1, 80));
        check("80 1 78", (2, 78));
        check("80 3", (1, 3));
        check("1 3", (0, 1));
        check("s9 80", (0, 137));
        check("s11", (0, 139));
        check("255", (0, 255));
    }

    #[test]
    fn peer_failure_outweighs_only_clean_exits() {
        check("81 81", (0, 81));
        check("81 1", (1, 1));
        check("79 81", (1, 81));
        check("0 81", (1, 81));
        check("81 80", (1, 80));
    }

    #[test]
    fn ranks_terminated_by_the_launcher_come_last() {
        check("s15! 1", (1, 1));
        check("79! 81", (1, 81));
        check("s9! 80", (1, 80));
        check("143! 80", (1, 80));
        check("80 137!", (0, 80));
        check("143 80", (0, 143));
        check("78! 1", (0, 78));
        check("s11! 80", (0, 139));
        // Stopped from outside, not by the launcher.
        check("s15 79", (0, 143));
    }

    #[test]
    fn silent_failure_is_described_by_last_lines() {
        let check = |exit, lines: &str, expected: Option<&str>| {
            let outcome = RankOutcome { exit, was_terminated_by_launcher: false };
            assert_eq!(outcome.describe(lines).as_deref(), expected);
        };
        check(ProcessExit::Code(0), "hello", None);
        check(ProcessExit::Code(3), "", Some("exit code 3"));
        check(ProcessExit::Code(3), "a\nb", Some("exit code 3; last lines: a\nb"));
        let unhandled = "terminated by SIGTERM, which the program does not handle";
        check(ProcessExit::Signal(15), "", Some(unhandled));
        check(ProcessExit::Signal(11), "x", Some("terminated by signal 11; last lines: x"));
    }
}
