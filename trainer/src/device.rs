//! Device selection: a GPU for each rank, or the CPU.

use burn::tensor::Device;
use stoker_api::names::ENV_DEVICE;

use crate::Result;
use crate::error::Infrastructure;

#[cfg(feature = "cuda")]
mod driver;
#[cfg(any(feature = "cuda", feature = "cubecl-cpu"))]
pub(crate) mod gpu_tensor;

/// A version of CUDA in its own encoding: 12080 is 12.8.
#[cfg(any(test, feature = "cuda"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct DriverVersion(i32);

#[cfg(any(test, feature = "cuda"))]
impl std::fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

#[cfg(any(test, feature = "cuda"))]
impl DriverVersion {
    /// Fails if this driver is older than `min`, the version that this program calls.
    fn check(self, min: Self) -> Result<()> {
        if self >= min {
            return Ok(());
        }
        Err(Infrastructure(format!(
            "the NVIDIA driver of this node supports CUDA {self}, but must support {min} or later; \
             update the driver (570 or later for CUDA 12.8), or set {ENV_DEVICE}=cpu to train on \
             CPUs"
        ))
        .into())
    }
}

/// Device of a rank.
#[derive(Clone, Debug)]
pub(crate) struct RankDevice {
    /// The device, with autodiff.
    pub(crate) device: Device,
    /// Index of the GPU among the visible ones; `None` for the CPU.
    pub(crate) gpu: Option<usize>,
}

impl RankDevice {
    /// Selects the device of a rank in its pod. Rank `n` uses visible GPU `n`, or the only one.
    /// Without any GPU it uses the CPU, unless `STOKER_DEVICE` is `cuda`.
    ///
    /// # Errors
    ///
    /// Fails if this rank has no GPU, its driver is too old, or `STOKER_DEVICE` is neither `cpu`
    /// nor `cuda`.
    pub(crate) fn for_local_rank(local_rank: usize) -> Result<Self> {
        #[cfg(feature = "cuda")]
        configure_tuning();
        let requested = std::env::var(ENV_DEVICE).ok().filter(|value| !value.is_empty());
        let gpu = select_gpu(requested.as_deref(), local_rank, num_gpus())?;
        #[cfg(feature = "cuda")]
        if gpu.is_some() {
            driver::version()?.check(driver::MIN)?;
            if !stoker_kernels::has_cublas() {
                eprintln!(
                    "stoker: found no libcublasLt.so.13 or libcublasLt.so.12 that this driver can \
                     use, so matrix products are slower; install cuBLAS of the driver's major \
                     version of CUDA, or add its directory to LD_LIBRARY_PATH"
                );
            }
        }
        Ok(Self { device: gpu.map_or_else(host, cuda).autodiff(), gpu })
    }
}

/// Selects the device of a worker of an inference job, by the rules of
/// [`RankDevice::for_local_rank`]. Workers on one machine see all of its GPUs and are distributed
/// evenly over them.
///
/// # Errors
///
/// Same as [`RankDevice::for_local_rank`].
pub(crate) fn for_worker(slot: u32) -> Result<Device> {
    Ok(RankDevice::for_local_rank(worker_gpu(slot, num_gpus()))?.device)
}

/// Returns the GPU of a worker, given the number of visible GPUs.
fn worker_gpu(slot: u32, gpus: Option<usize>) -> usize {
    usize::try_from(slot).unwrap_or_default() % gpus.unwrap_or(1).max(1)
}

/// Returns the GPU of a rank, or `None` for the CPU. `gpus` is the number of visible GPUs, or
/// `None` if this build does not support GPUs.
fn select_gpu(
    requested: Option<&str>,
    local_rank: usize,
    gpus: Option<usize>,
) -> Result<Option<usize>> {
    let has_rank_gpu = gpus.is_some_and(|num| local_rank < num);
    match (requested, gpus) {
        // If only one GPU is visible, the parent process has assigned it to this rank.
        (None | Some("cuda"), Some(1)) => Ok(Some(0)),
        (Some("cpu"), _) | (None, None | Some(0)) => Ok(None),
        (None | Some("cuda"), Some(_)) if has_rank_gpu => Ok(Some(local_rank)),
        (None | Some("cuda"), Some(num)) => Err(Infrastructure(format!(
            "rank {local_rank} of this pod has no GPU: {num} are visible; give the pod one GPU for \
             each rank, or set {ENV_DEVICE} to cpu"
        ))
        .into()),
        (Some("cuda"), None) => Err(format!(
            "{ENV_DEVICE} is cuda, but this program was built without stoker-trainer's feature \
             `cuda`; enable the feature, or set {ENV_DEVICE} to cpu"
        )
        .into()),
        (Some(requested), _) => {
            Err(format!("{ENV_DEVICE} is {requested:?}, but must be cpu or cuda").into())
        }
    }
}

/// Returns the CPU device. Keep arrays of samples on this device, even if a GPU trains on them. In
/// programs built with GPU support, burn's default device is a GPU.
pub fn host() -> Device {
    #[cfg(feature = "flex")]
    return Device::flex();
    #[cfg(not(feature = "flex"))]
    return Device::default();
}

/// Returns whether tensors on this device are in the memory of the host.
pub(crate) fn is_host(device: &Device) -> bool {
    device.clone().without_autodiff() == host()
}

/// Makes the CPU burn's default device, by executing this program again if necessary. burn loads
/// optimizer states from checkpoints to its default device. Without this call, every rank would
/// load them to the first GPU, even a rank that trains on another device.
///
/// # Errors
///
/// Fails if the program cannot be executed again.
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
        let text = format!("cannot execute this program again to select the CPU: {error}");
        return Err(Infrastructure(text).into());
    }
    Ok(())
}

/// Configures how burn tunes kernels.
///
/// - It keeps compiled kernels and the results of tuning in `cubecl`, in the user's cache
///   directory, for the next process on this machine. Otherwise, the location would depend on the
///   working directory. A file `cubecl.toml` with another location than `target` has priority.
/// - It measures every variant of a kernel. By default it takes the first whose rate is high
///   enough, and compares products in f32 with the rate without tensor cores. The environment
///   variable `CUBECL_AUTOTUNE_SHORT_CIRCUIT` has priority.
#[cfg(feature = "cuda")]
fn configure_tuning() {
    use cubecl_runtime::config::cache::CacheConfig;
    use cubecl_runtime::config::{CubeClRuntimeConfig, RuntimeConfig as _};

    let mut config = CubeClRuntimeConfig::from_current_dir();
    config.autotune.disable_short_circuit = true;
    let mut config = config.override_from_env();
    if matches!(config.environment.path, CacheConfig::Target) {
        config.environment.path = CacheConfig::Global;
    }
    // False if the program has set or used a configuration before, which then remains.
    let _ = CubeClRuntimeConfig::try_set(config);
}

#[cfg(feature = "cuda")]
fn cuda(gpu: usize) -> Device {
    Device::cuda(gpu)
}

/// Never called, because this build never selects a GPU.
#[cfg(not(feature = "cuda"))]
fn cuda(_gpu: usize) -> Device {
    host()
}

/// Returns the number of visible GPUs, 0 without a driver; `None` if this build does not support
/// GPUs.
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
    fn cpu_is_the_host_with_and_without_gradients() {
        assert!(is_host(&host()) && is_host(&host().autodiff()));
    }

    #[test]
    fn old_drivers_are_refused_with_their_version() {
        let min = DriverVersion(12_080);
        min.check(min).unwrap();
        DriverVersion(13_000).check(min).unwrap();
        let error = DriverVersion(12_040).check(min).unwrap_err().to_string();
        assert!(error.contains("supports CUDA 12.4, but must support 12.8"), "{error}");
        assert!(error.contains("STOKER_DEVICE=cpu"), "{error}");
    }

    #[test]
    fn workers_share_the_gpus_of_a_machine() {
        let check = |gpus, expected: [usize; 5]| {
            let found: Vec<usize> = (0..5).map(|slot| worker_gpu(slot, gpus)).collect();
            assert_eq!(found, expected, "{gpus:?}");
        };
        check(None, [0; 5]);
        check(Some(0), [0; 5]);
        check(Some(1), [0; 5]);
        check(Some(2), [0, 1, 0, 1, 0]);
        check(Some(8), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn each_rank_of_a_pod_has_its_gpu() {
        let check = |requested, local_rank, gpus, expected: Result<Option<usize>, &str>| {
            let gpu = select_gpu(requested, local_rank, gpus).map_err(|error| error.to_string());
            match (gpu, expected) {
                (Ok(gpu), Ok(expected)) => assert_eq!(gpu, expected),
                (Err(error), Err(expected)) => assert!(error.contains(expected), "{error}"),
                (gpu, expected) => panic!("{gpu:?}, not {expected:?}"),
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
