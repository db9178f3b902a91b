//! The flat buffer on burn's backend for GPUs, which runs on a CPU here.

use std::sync::Mutex;

use burn::tensor::Device;
use burn_cubecl::cubecl::cpu::CpuRuntime;
use bytes::Bytes;
use cubecl_runtime::runtime::Runtime;

use super::*;
use crate::device::gpu_tensor::GpuTensor;

/// Ranks whose sums are their values. Records the address of each tensor, and whether other values
/// share its memory.
#[derive(Debug, Default)]
struct InPlace(Mutex<Vec<(usize, bool)>>);

impl Collective for InPlace {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        2
    }

    fn sum_f32(&self, _: &mut [f32]) -> Result<()> {
        Err("sums tensors only".into())
    }

    fn sum_f64(&self, _: &mut [f64]) -> Result<()> {
        Err("sums tensors only".into())
    }

    fn sum_tensor(&self, values: Tensor<1>) -> Result<Tensor<1>> {
        let tensor = GpuTensor::new(values)?;
        let memory =
            tensor.client().get_resource::<<CpuRuntime as Runtime>::Server>(tensor.handle());
        let memory = memory.map_err(|error| format!("{error:?}"))?;
        let (address, _) = memory.resource().get_write_ptr_and_length();
        self.0.lock().unwrap().push((address.addr(), tensor.is_shared()));
        Ok(tensor.into_tensor())
    }

    fn all_gather(&self, _: Bytes) -> Result<Vec<Bytes>> {
        Err("sums tensors only".into())
    }
}

/// An optimizer may keep a mean, as momentum does with the first one.
#[test]
fn one_buffer_is_reused_unless_a_mean_is_kept() {
    let (mut buffers, ranks, mut kept) = (FlatBuffers::default(), InPlace::default(), None);
    // Takes the memory of a buffer that was freed after a step.
    let mut others = vec![];
    for step in 0..6_u8 {
        let lengths = [ALIGNMENT, 3];
        let value = f32::from(step + 1);
        buffers.start(lengths.into_iter().map(|len| (len, DType::F32)));
        for len in lengths {
            buffers.of(DType::F32).write(Tensor::full([len], value, &Device::cpu()) * 4.0);
        }
        buffers.sum(&ranks, 0.5).unwrap();
        for len in lengths {
            let mean = buffers.of(DType::F32).read(len).unwrap();
            if step == 1 && len == ALIGNMENT {
                kept = Some(mean.clone());
            }
            let mean = mean.into_data().try_to_vec::<f32>().unwrap();
            assert_eq!(mean, vec![2.0 * value; len], "step {step}");
        }
        let other = Tensor::<1>::full([2 * ALIGNMENT], value, &Device::cpu()) * 2.0;
        others.push(other.clone());
        assert_eq!(other.sum().into_scalar::<f32>(), 4.0 * value * ALIGNMENT as f32);
    }
    let kept = kept.unwrap().into_data().try_to_vec::<f32>().unwrap();
    assert_eq!(kept, [4.0; ALIGNMENT]);
    let sums = ranks.0.into_inner().unwrap();
    let address = |step: usize| sums[step].0;
    assert_eq!(address(0), address(1));
    assert_ne!(address(1), address(2), "the buffer of step 1 has a mean that is kept");
    assert!((3..6).all(|step| address(step) == address(2)), "{sums:?}");
    assert!(sums.iter().all(|(_, is_shared)| !is_shared), "{sums:?}");
}
