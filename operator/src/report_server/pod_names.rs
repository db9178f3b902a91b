//! Parses names of pods that may report.

use stoker_api::inference::Role;
use stoker_engine::inference::ProcessStart;

use crate::job::pods::pod_name as job_pod_name;
use crate::trial::pods::pod_name as trial_pod_name;

/// Returns attempt and index from the name of a pod of `trial`; `None` for another pod.
pub(super) fn parse_trial_pod(pod: &str, trial: &str) -> Option<(u32, u32)> {
    let (attempt, index) = pod.strip_prefix(trial)?.strip_prefix("-a")?.split_once("-r")?;
    let (attempt, index) = (attempt.parse().ok()?, index.parse().ok()?);
    (trial_pod_name(trial, attempt, index) == pod).then_some((attempt, index))
}

/// Returns attempt and slot from the name of a pod of `job`; `None` for another pod.
pub(super) fn parse_job_pod(pod: &str, job: &str) -> Option<(u32, u32)> {
    let (attempt, process) = pod.strip_prefix(job)?.strip_prefix("-a")?.split_once('-')?;
    let attempt = attempt.parse().ok()?;
    let (role, slot) = match process {
        "plan" => (Role::Plan, 0),
        "finish" => (Role::Finish, 0),
        _ => (Role::Work, process.strip_prefix('w')?.parse().ok()?),
    };
    (job_pod_name(job, ProcessStart { role, slot, attempt }) == pod).then_some((attempt, slot))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pods_of_the_trial_are_parsed() {
        let check = |pod: &str, expected: Option<(u32, u32)>| {
            assert_eq!(parse_trial_pod(pod, "net-a1-0"), expected, "{pod}");
        };
        check("net-a1-0-a2-r3", Some((2, 3)));
        check("net-a1-0-a0-r0", Some((0, 0)));
        check("net-a1-0-a02-r3", None);
        check("net-a1-0-a+2-r3", None);
        check("net-a1-0-a2-r", None);
        check("net-a1-0-a2-r3-x", None);
        check("net-a1-0-a2-r99999999999", None);
        check("net-a1-01-a2-r3", None);
        check("other-0-a2-r3", None);
        check("net-a1-0", None);
    }

    #[test]
    fn only_pods_of_the_job_are_parsed() {
        let check = |pod: &str, expected: Option<(u32, u32)>| {
            assert_eq!(parse_job_pod(pod, "job-a1"), expected, "{pod}");
        };
        check("job-a1-a0-plan", Some((0, 0)));
        check("job-a1-a3-w7", Some((3, 7)));
        check("job-a1-a12-finish", Some((12, 0)));
        check("job-a1-a3-w07", None);
        check("job-a1-a3-w", None);
        check("job-a1-a3-other", None);
        check("job-a1-a3-r0", None);
        check("job-a3-w7", None);
    }
}
