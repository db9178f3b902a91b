//! Tests on a GPU, or with feature `cubecl-cpu` on burn's backend for GPUs on a CPU.

use super::*;
use crate::device::host;

/// Returns the device of the tests. Without one, the test is skipped.
pub(crate) fn gpu() -> Option<Device> {
    #[cfg(feature = "cubecl-cpu")]
    return Some(Device::cpu());
    #[cfg(not(feature = "cubecl-cpu"))]
    match std::path::Path::new("/dev/nvidiactl").exists() {
        true => Some(Device::cuda(0)),
        false => {
            stoker_test_cluster::record_skip("needs an NVIDIA GPU");
            None
        }
    }
}

fn number(value: f32, device: &Device) -> Tensor<1> {
    Tensor::from_floats([value], device)
}

#[test]
fn queued_copies_have_the_values_of_their_time() {
    let Some(device) = gpu() else { return };
    let tensors = [number(3.0, &device) * 2.0, number(0.5, &device).cast(DType::BF16)];
    let copy = QueuedCopy::new(&tensors).unwrap();
    // burn would write the result into the same memory if the copy did not keep the tensor. The
    // backend for CPUs does not copy.
    let [first, _] = tensors;
    let later = first + 1.0;
    assert_eq!(later.into_scalar::<f32>(), 7.0);
    assert_eq!(copy.wait().unwrap(), [6.0, 0.5]);
}

#[test]
fn other_tensors_are_not_copied() {
    let Some(device) = gpu() else { return };
    let two = Tensor::from_floats([1.0, 2.0], &device);
    for tensors in [vec![], vec![number(1.0, &host())], vec![number(1.0, &device), two]] {
        assert!(QueuedCopy::new(&tensors).is_none(), "{tensors:?}");
    }
    let error = GpuTensor::new(number(1.0, &host())).err().unwrap();
    assert!(error.to_string().starts_with("not a tensor on a GPU"), "{error}");
}

#[test]
fn tensors_that_share_memory_are_noticed() {
    let Some(device) = gpu() else { return };
    let tensor = Tensor::full([1024], 2.0, &device) * 3.0;
    let copy = tensor.clone();
    let shared = GpuTensor::new(tensor).unwrap();
    assert!(shared.is_shared());
    drop(copy);
    let tensor = shared.into_tensor() + 1.0;
    assert_eq!(tensor.into_data().try_to_vec::<f32>().unwrap(), [7.0; 1024]);
}
