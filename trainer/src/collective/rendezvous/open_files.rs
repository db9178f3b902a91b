//! Limit of open files of rank 0, to which all other ranks connect.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::Result;
use crate::collective::Topology;
use crate::error::Infrastructure;

/// Number of connections to another rank: watchdog and hub. Ranks of the same pod have another one,
/// to the hub of the pod.
const FILES_PER_RANK: usize = 2;
/// Number of files that rank 0 has open at least: the ring, the storage and reports.
const FILES_MIN: u64 = 64;
/// Number of other files: also those of the program, and connections without a hello.
const FILES_SPARE: u64 = 512;

/// Raises the soft limit of open files if rank 0 of these ranks needs more. The limit becomes no
/// higher than necessary, because programs that use `select` fail with high file descriptors.
///
/// # Errors
///
/// Fails if the hard limit is too low.
pub(super) fn allow_connections(topology: Topology) -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    let Some(soft) = raised(topology, limit.current, limit.maximum)? else { return Ok(()) };
    let set = setrlimit(Resource::Nofile, Rlimit { current: Some(soft), ..limit });
    Ok(set.map_err(|error| {
        Infrastructure(format!("cannot raise the limit of open files to {soft}: {error}"))
    })?)
}

/// Returns the soft limit for these ranks if it must be raised. `None` is no limit.
fn raised(topology: Topology, soft: Option<u64>, hard: Option<u64>) -> Result<Option<u64>> {
    let size = topology.size;
    let num_local = if topology.has_local_group() { topology.local_size } else { 0 };
    let num_connections = (FILES_PER_RANK * size + num_local) as u64;
    let (min, wanted) = (num_connections + FILES_MIN, num_connections + FILES_SPARE);
    let wanted = hard.map_or(wanted, |hard| hard.min(wanted));
    if wanted < min {
        let text = format!(
            "rank 0 cannot connect {size} ranks: it needs {min} open files, but the hard limit is \
             {wanted}; raise it, for example LimitNOFILE of the container runtime"
        );
        return Err(Infrastructure(text).into());
    }
    Ok(soft.filter(|soft| *soft < wanted).map(|_| wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns rank 0 of `size` ranks in pods of `local_size`.
    fn lead(size: usize, local_size: usize) -> Topology {
        Topology { size, local_size, ..Topology::SINGLE_RANK }
    }

    #[test]
    fn limit_is_raised_only_for_large_gangs() {
        let check = |(size, local_size), soft, hard, expected| {
            let actual = raised(lead(size, local_size), soft, hard).unwrap();
            assert_eq!(actual, expected, "{size} {local_size} {soft:?} {hard:?}");
        };
        check((100, 1), Some(1024), Some(524_288), None);
        check((300, 1), Some(1024), Some(524_288), Some(1112));
        check((1024, 1), Some(1024), None, Some(2560));
        // Only the ranks of this pod have a third connection, if there are others.
        check((1024, 8), Some(1024), None, Some(2568));
        check((1024, 1024), Some(1024), None, Some(2560));
        check((1024, 1), Some(4096), Some(524_288), None);
        check((1024, 1), None, None, None);
        // The hard limit leaves fewer spare files.
        check((300, 1), Some(700), Some(700), None);
        check((300, 1), Some(100), Some(700), Some(700));
        check((328, 8), Some(1024), Some(1024), None);
    }

    #[test]
    fn low_hard_limits_are_refused() {
        let error = raised(lead(1024, 8), Some(1024), Some(2048)).unwrap_err().to_string();
        let expected = "rank 0 cannot connect 1024 ranks: it needs 2120 open files, but the hard \
                        limit is 2048; raise it, for example LimitNOFILE of the container runtime";
        assert_eq!(error, expected);
    }
}
