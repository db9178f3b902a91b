//! Determines the rank of this process and the rendezvous. Sources: the trial with Stoker's
//! launcher, the variables of torchrun, or `TF_CONFIG`.

use serde::Deserialize;
use stoker_api::contract::{Gang, TrialConfig};

use super::Topology;
use crate::Result;
use crate::error::Infrastructure;

/// Looks up an environment variable.
type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Secret of gangs that Stoker did not start. Without it, any process that reaches rank 0's port
/// can take part.
const ENV_SECRET: &str = "STOKER_GANG_SECRET";
/// Port of the rendezvous on rank 0, as set by torchrun.
const ENV_MASTER_PORT: &str = "MASTER_PORT";

/// Position of this process in its gang.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LaunchConfig {
    pub(crate) topology: Topology,
    /// `None` for a single rank.
    pub(super) gang: Option<Gang>,
}

impl LaunchConfig {
    pub(super) const SINGLE_RANK: Self = Self { topology: Topology::SINGLE_RANK, gang: None };

    /// Reads the variables of Stoker's launcher for the gang of the trial.
    ///
    /// # Errors
    ///
    /// Fails if a variable is missing or contradicts the trial.
    pub(crate) fn for_trial(config: &TrialConfig) -> Result<Self> {
        Self::from_trial(config, &lookup)
    }

    /// Reads the environment of a program without a runner: `TF_CONFIG`, otherwise the variables of
    /// torchrun. Without either, returns a single rank.
    ///
    /// # Errors
    ///
    /// Fails if a variable is missing or invalid.
    pub(crate) fn for_program() -> Result<Self> {
        match Self::parse_tf_config(&lookup)? {
            Self { gang: None, .. } => Self::parse_environment(&lookup),
            several => Ok(several),
        }
    }

    /// Reads `TF_CONFIG`.
    ///
    /// # Errors
    ///
    /// Fails if it is invalid, or if the task is not a worker.
    pub(super) fn from_tf_config() -> Result<Self> {
        Self::parse_tf_config(&lookup)
    }

    /// Reads `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and related variables.
    ///
    /// # Errors
    ///
    /// Fails if a variable is missing or invalid.
    pub(super) fn from_environment() -> Result<Self> {
        Self::parse_environment(&lookup)
    }

    fn from_trial(config: &TrialConfig, lookup: Lookup<'_>) -> Result<Self> {
        let Some(gang) = config.gang.as_ref().filter(|gang| gang.world_size > 1) else {
            return Ok(Self::SINGLE_RANK);
        };
        let number = |name: &str| {
            number(lookup, name)?.ok_or_else(|| {
                let size = gang.world_size;
                let text = format!(
                    "the trial has {size} ranks, but {name} is not set; start the program with \
                     `stoker-trainer launch -- PROGRAM`"
                );
                crate::Error::from(Infrastructure(text))
            })
        };
        let topology = Topology {
            rank: number("RANK")?,
            size: number("WORLD_SIZE")?,
            local_rank: number("LOCAL_RANK")?,
            local_size: number("LOCAL_WORLD_SIZE")?,
            cross_rank: number("CROSS_RANK")?,
            cross_size: number("CROSS_SIZE")?,
        };
        if topology.size != gang.world_size as usize {
            let (own, size) = (topology.size, gang.world_size);
            let text = format!("WORLD_SIZE is {own}, but the trial has {size} ranks");
            return Err(Infrastructure(text).into());
        }
        Ok(Self { topology: topology.validated()?, gang: Some(gang.clone()) })
    }

    fn parse_environment(lookup: Lookup<'_>) -> Result<Self> {
        let Some(address) = lookup("MASTER_ADDR") else { return Ok(Self::SINGLE_RANK) };
        let size = number(lookup, "WORLD_SIZE")?.unwrap_or(1);
        if size == 1 {
            return Ok(Self::SINGLE_RANK);
        }
        let needed = |names: &[&str]| -> Result<usize> {
            for name in names {
                if let Some(number) = number(lookup, name)? {
                    return Ok(number);
                }
            }
            let names = names.join(" or ");
            Err(Infrastructure(format!("WORLD_SIZE is {size}, but {names} is not set")).into())
        };
        let local_size = needed(&["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])?;
        let topology = Topology {
            rank: needed(&["RANK"])?,
            size,
            local_rank: needed(&["LOCAL_RANK"])?,
            local_size,
            cross_rank: needed(&["GROUP_RANK", "CROSS_RANK"])?,
            cross_size: needed(&["GROUP_WORLD_SIZE", "CROSS_SIZE"])?,
        };
        let port = needed(&[ENV_MASTER_PORT])?;
        // torchrun's agent listens on this port for the ranks of PyTorch.
        let is_taken = lookup("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
        let port = match (is_taken, port) {
            (false, port) => port,
            (true, 65_535) => 65_534,
            (true, port) => port + 1,
        };
        let gang = gang(size, local_size, format!("{address}:{port}"), lookup);
        Ok(Self { topology: topology.validated()?, gang: Some(gang) })
    }

    fn parse_tf_config(lookup: Lookup<'_>) -> Result<Self> {
        #[derive(Deserialize)]
        struct TfConfig {
            cluster: Cluster,
            task: Task,
        }
        #[derive(Deserialize)]
        struct Cluster {
            worker: Vec<String>,
        }
        #[derive(Deserialize)]
        struct Task {
            #[serde(rename = "type")]
            type_: String,
            index: usize,
        }
        let Some(text) = lookup("TF_CONFIG").filter(|text| !text.is_empty()) else {
            return Ok(Self::SINGLE_RANK);
        };
        let config: TfConfig = serde_json::from_str(&text)
            .map_err(|error| Infrastructure(format!("cannot parse TF_CONFIG: {error}")))?;
        let (size, rank) = (config.cluster.worker.len(), config.task.index);
        if config.task.type_ != "worker" || rank >= size {
            let type_ = config.task.type_;
            let text = format!(
                "TF_CONFIG declares this process as {type_} {rank} of {size}, but it must be a \
                 worker of its cluster"
            );
            return Err(Infrastructure(text).into());
        }
        if size == 1 {
            return Ok(Self::SINGLE_RANK);
        }
        let (cross_rank, cross_size) = (rank, size);
        let topology =
            Topology { rank, size, local_rank: 0, local_size: 1, cross_rank, cross_size };
        let gang = gang(size, 1, config.cluster.worker[0].clone(), lookup);
        Ok(Self { topology, gang: Some(gang) })
    }
}

fn lookup(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn gang(size: usize, local_size: usize, rendezvous: String, lookup: Lookup<'_>) -> Gang {
    let secret = lookup(ENV_SECRET).unwrap_or_default();
    Gang { world_size: size as u32, ranks_per_pod: local_size as u32, rendezvous, secret }
}

fn number(lookup: Lookup<'_>, name: &str) -> Result<Option<usize>> {
    let Some(text) = lookup(name) else { return Ok(None) };
    let number = text.parse().ok().filter(|number| *number <= u32::MAX as usize);
    let refused = || Infrastructure(format!("{name} is {text:?}, but must be a number"));
    Ok(Some(number.ok_or_else(refused)?))
}

impl Topology {
    fn validated(self) -> Result<Self> {
        let Self { rank, size, local_rank, local_size, .. } = self;
        let fits = rank < size
            && local_rank < local_size
            && local_rank <= rank
            && rank - local_rank + local_size <= size;
        match fits {
            true => Ok(self),
            false => Err(Infrastructure(format!(
                "rank {rank} of {size} cannot be rank {local_rank} of {local_size} in its pod"
            ))
            .into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expects rank, size, local rank, local size, cross rank, cross size and the rendezvous.
    fn check(
        read: fn(Lookup<'_>) -> Result<LaunchConfig>,
        variables: &[(&str, &str)],
        expected: Result<([usize; 6], &str), &str>,
    ) {
        let lookup = |name: &str| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        };
        let actual = read(&lookup).map(|launch| {
            let n = launch.topology;
            let numbers = [n.rank, n.size, n.local_rank, n.local_size, n.cross_rank, n.cross_size];
            (numbers, launch.gang.map(|gang| gang.rendezvous).unwrap_or_default())
        });
        match (actual, expected) {
            (Ok(actual), Ok((numbers, rendezvous))) => {
                assert_eq!(actual, (numbers, rendezvous.to_owned()));
            }
            (Err(actual), Err(expected)) => assert_eq!(actual.to_string(), expected),
            (actual, expected) => panic!("{actual:?}, not {expected:?}"),
        }
    }

    const SINGLE_RANK: [usize; 6] = [0, 1, 0, 1, 0, 1];

    #[test]
    fn torchrun_variables_are_parsed() {
        let torch = [
            ("RANK", "3"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("GROUP_RANK", "1"),
            ("GROUP_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "a"),
            ("MASTER_PORT", "29500"),
        ];
        check(LaunchConfig::parse_environment, &torch, Ok(([3, 4, 1, 2, 1, 2], "a:29500")));
        let with_agent = [&torch[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        check(LaunchConfig::parse_environment, &with_agent, Ok(([3, 4, 1, 2, 1, 2], "a:29501")));
        check(LaunchConfig::parse_environment, &[], Ok((SINGLE_RANK, "")));
        // Without a rendezvous address, the other variables are ignored.
        check(LaunchConfig::parse_environment, &torch[..6], Ok((SINGLE_RANK, "")));
        let without = |name: &str| -> Vec<_> {
            torch.iter().copied().filter(|(key, _)| *key != name).collect()
        };
        let missing = "WORLD_SIZE is 4, but RANK is not set";
        check(LaunchConfig::parse_environment, &without("RANK"), Err(missing));
        let with =
            |name: &'static str, value: &'static str| [vec![(name, value)], without(name)].concat();
        let refused = "RANK is \"x\", but must be a number";
        check(LaunchConfig::parse_environment, &with("RANK", "x"), Err(refused));
        let refused = "rank 4 of 4 cannot be rank 1 of 2 in its pod";
        check(LaunchConfig::parse_environment, &with("RANK", "4"), Err(refused));
        let refused = "rank 3 of 4 cannot be rank 2 of 2 in its pod";
        check(LaunchConfig::parse_environment, &with("LOCAL_RANK", "2"), Err(refused));
    }

    #[test]
    fn tf_config_is_parsed() {
        let text = |workers: &str, type_: &str, index: u32| {
            format!(
                r#"{{"cluster":{{"worker":[{workers}]}},
                "task":{{"type":"{type_}","index":{index}}}}}"#
            )
        };
        fn check(text: &str, expected: Result<([usize; 6], &str), &str>) {
            super::tests::check(LaunchConfig::parse_tf_config, &[("TF_CONFIG", text)], expected);
        }
        check(&text(r#""a:1","b:2""#, "worker", 1), Ok(([1, 2, 0, 1, 1, 2], "a:1")));
        check(&text(r#""a:1""#, "worker", 0), Ok((SINGLE_RANK, "")));
        check("", Ok((SINGLE_RANK, "")));
        let refused = |what: &str| {
            format!(
                "TF_CONFIG declares this process as {what}, but it must be a worker of its cluster"
            )
        };
        check(&text(r#""a:1","b:2""#, "ps", 0), Err(&refused("ps 0 of 2")));
        check(&text(r#""a:1","b:2""#, "worker", 2), Err(&refused("worker 2 of 2")));
        let eof = "cannot parse TF_CONFIG: EOF while parsing an object at line 1 column 1";
        check("{", Err(eof));
    }
}
