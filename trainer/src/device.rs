//! Where this process trains: on a GPU of its own, or on the CPU.

use burn::tensor::Device;
use stoker_api::names::ENV_DEVICE;

use crate::Result;
use crate::error::Infrastructure;

/// Where this process trains.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// With autodiff.
    pub(crate) device: Device,
    /// The number of its GPU among those that are visible; none: the CPU.
    pub(crate) gpu: Option<usize>,
}

impl Place {
    /// That of a rank of a pod. Rank `n` has the GPU `n` of those that are visible, or the only one; without any it
    /// trains on the CPU, unless `STOKER_DEVICE` is `cuda`.
    ///
    /// # Errors
    ///
    /// There is no GPU for this rank, or `STOKER_DEVICE` is neither `cpu` nor `cuda`.
    pub(crate) fn of(local_rank: usize) -> Result<Self> {
        let wish = std::env::var(ENV_DEVICE).ok().filter(|it| !it.is_empty());
        let gpu = chosen(wish.as_deref(), local_rank, num_gpus())?;
        Ok(Self { device: gpu.map_or_else(host, cuda).autodiff(), gpu })
    }
}

/// The device of a worker of an inference job, as [`Place::of`] that of a rank. Workers of one machine each see all of its
/// GPUs, and share these evenly.
///
/// # Errors
///
/// As [`Place::of`].
pub(crate) fn of_worker(slot: u32) -> Result<Device> {
    Ok(Place::of(shared(slot, num_gpus()))?.device)
}

/// The GPU of a worker where there are so many.
fn shared(slot: u32, gpus: Option<usize>) -> usize {
    usize::try_from(slot).unwrap_or_default() % gpus.unwrap_or(1).max(1)
}

/// The GPU of a rank, given how many are visible; `None`: programs of this build use none.
fn chosen(wish: Option<&str>, local_rank: usize, gpus: Option<usize>) -> Result<Option<usize>> {
    let has_own = gpus.is_some_and(|num| local_rank < num);
    match (wish, gpus) {
        // Whoever started this process has chosen its GPU.
        (None | Some("cuda"), Some(1)) => Ok(Some(0)),
        (Some("cpu"), _) | (None, None | Some(0)) => Ok(None),
        (None | Some("cuda"), Some(_)) if has_own => Ok(Some(local_rank)),
        (None | Some("cuda"), Some(num)) => Err(Infrastructure(format!(
            "rank {local_rank} of this pod has no GPU: {num} are visible; give the pod one for each \
             rank, or set {ENV_DEVICE} to cpu"
        ))
        .into()),
        (Some("cuda"), None) => Err(format!(
            "{ENV_DEVICE} is cuda, but this program was built without stoker-trainer's feature \
             `cuda`: build it with that, or set {ENV_DEVICE} to cpu"
        )
        .into()),
        (Some(wish), _) => {
            Err(format!("{ENV_DEVICE} is {wish:?}, but must be cpu or cuda").into())
        }
    }
}

/// The CPU, where arrays of samples are kept whatever trains on them: burn's default device is a GPU in a program that is
/// built for these.
pub fn host() -> Device {
    #[cfg(feature = "flex")]
    return Device::flex();
    #[cfg(not(feature = "flex"))]
    return Device::default();
}

/// Makes the CPU burn's default device, by starting this program again if it is not: burn brings the states of optimizers
/// from checkpoints to the default device, which would be the first GPU for every rank, and for those without any.
///
/// # Errors
///
/// The program's own file cannot be started.
pub(crate) fn prefer_host() -> Result<()> {
    #[cfg(all(feature = "cuda", feature = "flex"))]
    if std::env::var_os("BURN_DEVICE").is_none() {
        use std::os::unix::process::CommandExt as _;

        let mut arguments = std::env::args_os();
        let mut again = std::process::Command::new("/proc/self/exe");
        if let Some(name) = arguments.next() {
            again.arg0(name);
        }
        let error = again.args(arguments).env("BURN_DEVICE", "flex").exec();
        return Err(Infrastructure(format!("the program's own file: {error}")).into());
    }
    Ok(())
}

#[cfg(feature = "cuda")]
fn cuda(gpu: usize) -> Device {
    Device::cuda(gpu)
}

/// Never called: no GPU is chosen.
#[cfg(not(feature = "cuda"))]
fn cuda(_gpu: usize) -> Device {
    host()
}

/// GPUs that are visible; none without a driver.
fn num_gpus() -> Option<usize> {
    #[cfg(feature = "cuda")]
    return Some(Device::enumerate(burn::tensor::DeviceType::Cuda).into_vec().len());
    #[cfg(not(feature = "cuda"))]
    return None;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_share_the_gpus_of_a_machine() {
        let check = |gpus, expected: [usize; 5]| {
            let found: Vec<usize> = (0..5).map(|slot| shared(slot, gpus)).collect();
            assert_eq!(found, expected, "{gpus:?}");
        };
        check(None, [0; 5]);
        check(Some(0), [0; 5]);
        check(Some(1), [0; 5]);
        check(Some(2), [0, 1, 0, 1, 0]);
        check(Some(8), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn each_rank_of_a_pod_has_its_own_gpu_and_none_trains_elsewhere_unasked() {
        let check = |wish, local_rank, gpus, expected: Result<Option<usize>, &str>| {
            let found = chosen(wish, local_rank, gpus).map_err(|it| it.to_string());
            match (found, expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected),
                (Err(found), Err(expected)) => assert!(found.contains(expected), "{found}"),
                (found, expected) => panic!("{found:?}, not {expected:?}"),
            }
        };
        check(None, 0, None, Ok(None));
        check(None, 0, Some(0), Ok(None));
        check(None, 1, Some(2), Ok(Some(1)));
        check(None, 2, Some(2), Err("rank 2 of this pod has no GPU: 2 are visible"));
        check(Some("cuda"), 0, Some(1), Ok(Some(0)));
        check(None, 3, Some(1), Ok(Some(0)));
        check(Some("cuda"), 3, Some(1), Ok(Some(0)));
        check(Some("cpu"), 3, Some(1), Ok(None));
        check(Some("cuda"), 0, Some(0), Err("rank 0 of this pod has no GPU: 0 are visible"));
        check(Some("cuda"), 0, None, Err("was built without stoker-trainer's feature `cuda`"));
        check(Some("cpu"), 0, Some(8), Ok(None));
        check(Some("gpu"), 0, Some(8), Err("STOKER_DEVICE is \"gpu\", but must be cpu or cuda"));
    }
}
