//! Origin of a log line, and its prefix.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use stoker_api::experiment::Experiment;
use stoker_api::inference::InferenceJob;
use stoker_api::names::{LABEL_ATTEMPT, LABEL_JOB, LABEL_POD_INDEX, LABEL_TRIAL};

use crate::cluster::text;

/// Number of ranks and their distribution over pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gang {
    pub(crate) world_size: u32,
    pub(crate) ranks_per_pod: u32,
}

impl Gang {
    pub(crate) fn of(experiment: &Experiment) -> Self {
        let resources = &experiment.spec.resources;
        let ranks_per_pod = resources.slots_per_pod();
        Self { world_size: resources.num_pods() * ranks_per_pod, ranks_per_pod }
    }

    /// Treats each slot of a job as a pod with one rank.
    pub(crate) fn of_job(job: &InferenceJob) -> Self {
        Self { world_size: job.spec.resources.slots, ranks_per_pod: 1 }
    }

    /// Returns the number of ranks or slots with their numbers, such as `4 ranks, 0 to 3`.
    pub(crate) fn numbered(self, noun: &str) -> String {
        let num = usize::try_from(self.world_size).unwrap_or(usize::MAX);
        text::numbered(num, noun, 0, num.saturating_sub(1))
    }

    pub(super) fn num_pods(self) -> u32 {
        self.world_size / self.ranks_per_pod
    }
}

/// Origin of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag {
    /// Trial index; for a job the slot.
    pub(crate) trial: u32,
    pub(crate) attempt: u32,
    /// Pod index; for a job the slot.
    pub(crate) pod: u32,
    pub(crate) gang: Gang,
    /// Whether lines of other trials are printed too.
    pub(crate) with_trial: bool,
    /// Whether the line is from a job, whose slots are independent.
    pub(crate) is_job: bool,
}

impl Tag {
    /// Returns the tag of a pod from its labels; `None` if it belongs to neither trial nor job.
    pub(super) fn of_pod(pod: &Pod, gang: Gang, with_trial: bool) -> Option<Self> {
        let labels = pod.metadata.labels.as_ref()?;
        let number = |name: &str| labels.get(name)?.parse().ok();
        let (attempt, pod) = (number(LABEL_ATTEMPT)?, number(LABEL_POD_INDEX)?);
        let is_job = labels.contains_key(LABEL_JOB);
        let trial = match is_job {
            true => pod,
            false => labels.get(LABEL_TRIAL)?.rsplit_once('-')?.1.parse().ok()?,
        };
        Some(Self { trial, attempt, pod, gang, with_trial, is_job })
    }

    /// Returns `true` if the pod contains the rank, or if `rank` is `None`.
    pub(super) fn has(&self, rank: Option<u32>) -> bool {
        rank.is_none_or(|rank| rank / self.gang.ranks_per_pod == self.pod)
    }

    /// Returns a line with its prefixes; `None` if it is from another rank than `selected`. In a
    /// gang, lines of ranks start with `[rank=N]`; other lines are from the launcher.
    pub(super) fn text(&self, line: &str, selected: Option<u32>) -> Option<String> {
        if self.is_job {
            return Some(match self.gang.world_size {
                1 => line.to_owned(),
                _ => format!("[slot={}] {line}", self.pod),
            });
        }
        let (rank, _) = self.rank(line, selected)?;
        let has_prefix = rank.is_some() && self.gang.world_size > 1;
        let pod = match !has_prefix && self.gang.num_pods() > 1 {
            true => format!("[pod={}] ", self.pod),
            false => String::new(),
        };
        let trial = match self.with_trial {
            true => format!("[trial={}] ", self.trial),
            false => String::new(),
        };
        Some(format!("{trial}{pod}{line}"))
    }

    /// Same as [`text`](Self::text), with the prefixes as fields.
    pub(super) fn json(&self, line: &str, selected: Option<u32>) -> Option<Value> {
        if self.is_job {
            return Some(json!({"slot": self.pod, "attempt": self.attempt, "line": line}));
        }
        let (rank, line) = self.rank(line, selected)?;
        Some(json!({
            "trial": self.trial, "attempt": self.attempt, "pod": self.pod, "rank": rank,
            "line": line,
        }))
    }

    /// Splits the rank off a line. A trial with one rank prints no prefixes.
    fn rank<'a>(&self, line: &'a str, selected: Option<u32>) -> Option<(Option<u32>, &'a str)> {
        let alone = (self.gang.world_size == 1).then_some(0);
        let (rank, line) = match rank_of(line) {
            Some((rank, rest)) => (Some(rank), rest),
            None => (alone, line),
        };
        (selected.is_none() || rank == selected).then_some((rank, line))
    }
}

/// Splits the prefix `[rank=N] ` off a line.
fn rank_of(line: &str) -> Option<(u32, &str)> {
    let (rank, rest) = line.strip_prefix("[rank=")?.split_once("] ")?;
    Some((rank.parse().ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALONE: Gang = Gang { world_size: 1, ranks_per_pod: 1 };
    const WIDE: Gang = Gang { world_size: 4, ranks_per_pod: 1 };
    const FULL: Gang = Gang { world_size: 4, ranks_per_pod: 2 };

    fn tag(gang: Gang, pod: u32, with_trial: bool) -> Tag {
        Tag { trial: 7, attempt: 1, pod, gang, with_trial, is_job: false }
    }

    fn check(tag: Tag, line: &str, rank: Option<u32>, expected: Option<&str>) {
        let text = tag.text(line, rank);
        assert_eq!(text.as_deref(), expected, "{tag:?} {line} {rank:?}");
    }

    #[test]
    fn lines_get_missing_prefixes() {
        check(tag(ALONE, 0, false), "loss 1", None, Some("loss 1"));
        check(tag(ALONE, 0, true), "loss 1", None, Some("[trial=7] loss 1"));
        check(tag(WIDE, 2, false), "[rank=2] loss 1", None, Some("[rank=2] loss 1"));
        check(tag(WIDE, 2, true), "[rank=2] x", None, Some("[trial=7] [rank=2] x"));
        check(tag(FULL, 1, false), "launcher", None, Some("[pod=1] launcher"));
        check(tag(WIDE, 2, false), "[rank=x] y", None, Some("[pod=2] [rank=x] y"));
    }

    #[test]
    fn lines_are_filtered_by_rank() {
        check(tag(FULL, 1, false), "[rank=3] a", Some(3), Some("[rank=3] a"));
        check(tag(FULL, 1, false), "[rank=2] a", Some(3), None);
        check(tag(FULL, 1, false), "launcher", Some(3), None);
        check(tag(ALONE, 0, false), "a", Some(0), Some("a"));
        let has = |pod: u32, rank: u32| tag(FULL, pod, false).has(Some(rank));
        assert_eq!([has(0, 1), has(1, 1), has(1, 2)], [true, false, true]);
        assert!(tag(FULL, 1, false).has(None));
    }

    #[test]
    fn job_lines_are_prefixed_with_the_slot() {
        let of_job = |gang: Gang| Tag { is_job: true, ..tag(gang, 2, false) };
        check(of_job(WIDE), "[rank=0] a", None, Some("[slot=2] [rank=0] a"));
        check(of_job(ALONE), "a", None, Some("a"));
        let value = of_job(WIDE).json("a", None).unwrap();
        assert_eq!(value, json!({"attempt": 1, "line": "a", "slot": 2}));
        assert!(of_job(WIDE).has(Some(2)) && !of_job(WIDE).has(Some(1)));
    }

    #[test]
    fn json_lines_have_the_rank_as_a_field() {
        let value = tag(FULL, 1, false).json("[rank=3] a", None).unwrap();
        assert_eq!(value, json!({"trial": 7, "attempt": 1, "pod": 1, "rank": 3, "line": "a"}));
    }

    #[test]
    fn pod_labels_give_the_tag() {
        let pod = |labels: serde_json::Value| -> Pod {
            serde_json::from_value(json!({"metadata": {"labels": labels}})).unwrap()
        };
        let labels = json!({
            "stoker.dev/trial": "mnist-7", "stoker.dev/attempt": "1", "stoker.dev/pod-index": "2",
        });
        assert_eq!(Tag::of_pod(&pod(labels), WIDE, false), Some(tag(WIDE, 2, false)));
        assert_eq!(Tag::of_pod(&pod(json!({"stoker.dev/trial": "mnist-7"})), WIDE, false), None);
    }
}
