//! Clips gradients to a global norm on their device, without waiting for it.

use std::collections::BTreeSet;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};

use super::GradientSum;
use super::parameters::for_each_parameter;
use crate::device::is_host;

impl GradientSum {
    /// Returns whether all gradients are in single precision on one GPU.
    pub(super) fn is_on_one_gpu<M: Module>(&self, model: &M) -> bool {
        let (mut devices, mut is_single) = (vec![], true);
        for_each_parameter(model, &mut |_, param| {
            is_single &= param.dtype() == DType::F32;
            devices.push(param.device());
        });
        let is_gpu = devices.first().is_some_and(|device| !is_host(device));
        is_gpu && is_single && devices.iter().all(|device| *device == devices[0])
    }

    /// Returns the gradients times `factor`, clipped to a global norm of at most `norm_max`. A
    /// parameter shared by several modules counts once. If the norm is NaN, nothing is clipped.
    pub(super) fn clip_on_device<M: Module>(
        mut self,
        model: &M,
        norm_max: f64,
        factor: f64,
    ) -> GradientsParams {
        let (mut squares, mut counted) = (vec![], BTreeSet::new());
        for_each_parameter(model, &mut |_, param| {
            if counted.insert(param.id()) {
                squares.extend(param.sum_of_squares(&self.gradients));
            }
        });
        let mut clipped = GradientsParams::new();
        if squares.is_empty() {
            return clipped;
        }
        let norm = Tensor::cat(squares, 0).sum().sqrt() * factor;
        let exceeds = norm.clone().greater_elem(norm_max);
        let factor =
            (norm.ones_like() * factor).mask_where(exceeds, norm.recip() * (norm_max * factor));
        for_each_parameter(model, &mut |_, param| {
            param.scale(&mut self.gradients, &mut clipped, &factor);
        });
        clipped
    }
}

#[cfg(test)]
mod tests {
    use burn::module::Param;
    use burn::tensor::Device;

    use super::*;
    use crate::collective::SingleRank;
    use crate::step::StepOutput;

    #[derive(Module, Debug)]
    struct Two {
        one: Param<Tensor<1>>,
        other: Param<Tensor<1>>,
    }

    /// Values that are not finite stay visible, and a shared parameter counts once.
    #[test]
    fn devices_clip_like_the_host() {
        let device = Device::flex().autodiff();
        let mean = |gradient: [f32; 2], norm_max, on_device| {
            let one = crate::record::initialize(Param::from_tensor(Tensor::ones([2], &device)));
            let model = Two { other: one.clone(), one };
            let loss = (model.one.val() * Tensor::from_floats(gradient, &device)).sum();
            let mut sum = GradientSum::default();
            sum.add(&model, Some(StepOutput::sum(loss, 4)), false);
            let clipped = match on_device {
                true => sum.clip_on_device(&model, norm_max, 0.25),
                false => sum.normalize(&model, Some(norm_max), &SingleRank).unwrap(),
            };
            let clipped = clipped.get::<1>(model.one.id).unwrap();
            clipped.into_data().try_to_vec::<f32>().unwrap()
        };
        for (gradient, norm_max) in [
            ([12.0, 16.0], 5.0),
            ([12.0, 16.0], 2.5),
            ([12.0, 16.0], 0.0),
            ([0.0, 0.0], 1.0),
            ([f32::NAN, 1.0], 1.0),
            ([f32::INFINITY, 1.0], 1.0),
        ] {
            let (device, host) = (mean(gradient, norm_max, true), mean(gradient, norm_max, false));
            let is_same = |(a, b): (&f32, &f32)| a == b || (a.is_nan() && b.is_nan());
            let is_same = device.iter().zip(&host).all(is_same);
            assert!(is_same, "{gradient:?}, {norm_max}: {device:?} {host:?}");
        }
    }

    fn is_on_one_gpu(device: &Device, dtypes: [DType; 2]) -> bool {
        let [one, other] =
            dtypes.map(|dtype| Param::from_tensor(Tensor::<1>::ones([2], (device, dtype))));
        let model = crate::record::initialize(Two { one, other });
        GradientSum::default().is_on_one_gpu(&model)
    }

    #[test]
    fn gradients_on_the_host_are_clipped_there() {
        assert!(!is_on_one_gpu(&Device::flex().autodiff(), [DType::F32; 2]));
    }

    /// Tests on a GPU, or on burn's backend for GPUs on a CPU.
    #[cfg(any(feature = "cuda", feature = "cubecl-cpu"))]
    mod cubecl {
        use super::*;
        use crate::device::gpu_tensor::tests::gpu;

        #[derive(Module, Debug)]
        struct Layer {
            weight: Param<Tensor<2>>,
            bias: Param<Tensor<1>>,
        }

        #[test]
        fn only_single_precision_is_clipped_on_a_gpu() {
            let Some(device) = gpu().map(Device::autodiff) else { return };
            assert!(is_on_one_gpu(&device, [DType::F32; 2]));
            for other in [DType::F64, DType::BF16] {
                assert!(!is_on_one_gpu(&device, [DType::F32, other]), "{other:?}");
            }
        }

        #[test]
        fn layers_are_clipped_like_on_the_host() {
            let Some(device) = gpu().map(Device::autodiff) else { return };
            let clipped = |device: Device| {
                let weight = Tensor::<2>::ones([2, 3], &device);
                let bias = Tensor::<1>::ones([3], &device);
                let layer =
                    Layer { weight: Param::from_tensor(weight), bias: Param::from_tensor(bias) };
                let layer = crate::record::initialize(layer);
                let factors =
                    Tensor::<2>::from_floats([[1.0, -2.0, 3.0], [4.0, 0.5, 6.0]], &device);
                let loss = (layer.weight.val() * factors).sum() + layer.bias.val().sum() * 2.0;
                let mut sum = GradientSum::default();
                sum.add(&layer, Some(StepOutput::sum(loss, 2)), false);
                let clipped = sum.normalize(&layer, Some(0.5), &SingleRank).unwrap();
                let weight = clipped.get::<2>(layer.weight.id).unwrap().into_data();
                let bias = clipped.get::<1>(layer.bias.id).unwrap().into_data();
                [weight, bias].map(|data| data.try_to_vec::<f32>().unwrap()).concat()
            };
            let (gpu, host) = (clipped(device), clipped(Device::flex().autodiff()));
            let squares: f32 = gpu.iter().map(|value| value * value).sum();
            assert!((squares.sqrt() - 0.5).abs() < 1e-6, "{gpu:?}");
            let is_close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-6;
            assert!(gpu.iter().zip(&host).all(is_close), "{gpu:?} {host:?}");
        }
    }
}
