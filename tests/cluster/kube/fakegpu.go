package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	resource = "nvidia.com/gpu"
	endpoint = "stoker-gpu.sock"
	// Interval at which the devices file and the plugin's socket are checked.
	pollInterval = 100 * time.Millisecond
)

// plugin implements the kubelet's device plugin API with fake GPUs.
//
// A file lists the GPUs, one per line, and marks unhealthy ones as `sick`:
//
//	gpu-0
//	gpu-1 sick
type plugin struct {
	api.UnimplementedDevicePluginServer
	devicesFile string
}

// readDevices returns the GPUs in the file; none if it cannot be read.
func (p *plugin) readDevices() []*api.Device {
	text, err := os.ReadFile(p.devicesFile)
	if err != nil {
		return nil
	}
	var devices []*api.Device
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		device := &api.Device{ID: words[0], Health: api.Healthy}
		if slices.Contains(words[1:], "sick") {
			device.Health = api.Unhealthy
		}
		devices = append(devices, device)
	}
	return devices
}

func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

func (p *plugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	// Differs from every list, so that the first one is sent even if it is empty.
	sent := "none"
	for {
		devices := p.readDevices()
		if current := fmt.Sprint(devices); current != sent {
			if err := stream.Send(&api.ListAndWatchResponse{Devices: devices}); err != nil {
				return err
			}
			sent = current
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-time.After(pollInterval):
		}
	}
}

func (p *plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		ids := slices.Sorted(slices.Values(container.DevicesIds))
		response.ContainerResponses = append(response.ContainerResponses, &api.ContainerAllocateResponse{
			Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(ids, ",")},
		})
	}
	return response, nil
}

// fakeGPU serves until it is killed. A starting kubelet empties the plugin directory, so fakeGPU then
// creates its socket and registers again.
func fakeGPU(args []string) error {
	if len(args) != 2 {
		return errors.New("usage: fake-gpu PLUGIN_DIRECTORY DEVICES_FILE")
	}
	for {
		if err := serveUntilRemoved(args[0], &plugin{devicesFile: args[1]}); err != nil {
			fmt.Fprintln(os.Stderr, "fake-gpu: retrying:", err)
		}
		time.Sleep(pollInterval)
	}
}

// serveUntilRemoved registers with the kubelet and serves until the plugin's socket is deleted.
func serveUntilRemoved(directory string, server *plugin) error {
	socket := filepath.Join(directory, endpoint)
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	grpcServer := grpc.NewServer()
	api.RegisterDevicePluginServer(grpcServer, server)
	go func() { _ = grpcServer.Serve(listener) }()
	defer grpcServer.Stop()

	if err := register(filepath.Join(directory, "kubelet.sock")); err != nil {
		return err
	}
	for {
		if _, err := os.Stat(socket); err != nil {
			return nil
		}
		time.Sleep(pollInterval)
	}
}

// register announces the plugin to the kubelet that listens on a socket.
func register(kubeletSocket string) error {
	connection, err := grpc.NewClient("unix:"+kubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, err = api.NewRegistrationClient(connection).Register(ctx, &api.RegisterRequest{
		Version: api.Version, Endpoint: endpoint, ResourceName: resource,
	})
	return err
}
